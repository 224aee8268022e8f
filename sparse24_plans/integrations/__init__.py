"""Other libraries' extension points. Each module imports its host, and is itself imported after its host."""
