"""The only contact with transformers: attach, decode, save, load."""
