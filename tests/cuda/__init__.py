"""What needs a GPU; nothing here is collected where there is none."""
