"""Running a recipe: cells, the store of trained networks, engines, progress."""
