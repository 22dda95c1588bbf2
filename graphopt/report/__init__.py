"""What is shown to people: the report and the picture."""
