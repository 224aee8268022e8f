"""Clean-room code for foreign formats and ABIs. VENDOR.md says what each file owes to which document."""
