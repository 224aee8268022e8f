"""What only maintainers run, from a checkout: records, and what is written from them and checked of them."""
