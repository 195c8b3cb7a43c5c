"""Other people's training loops: transformers, Lightning, several processes."""
