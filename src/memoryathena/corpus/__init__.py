"""Text in, token shards out: read, split, tokenise, store, read back, compare."""
