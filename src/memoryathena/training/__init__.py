"""Three stages, one loop: memory, pathways, router."""
