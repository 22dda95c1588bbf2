"""torch.compile as the front end: what it traces is planned and rewritten here."""
