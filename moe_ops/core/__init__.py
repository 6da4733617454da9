"""What every part needs and nothing else: formats, architecture questions, argument checks, op registration, kernel launches."""
