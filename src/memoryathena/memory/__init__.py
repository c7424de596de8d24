"""The method: pure torch. No files, no transformers."""
