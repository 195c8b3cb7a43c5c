"""SpaM with other libraries: transformers, peft, Lightning, and several processes."""
