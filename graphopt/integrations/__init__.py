"""Bridges to other libraries: Hugging Face models and torch.compile."""
