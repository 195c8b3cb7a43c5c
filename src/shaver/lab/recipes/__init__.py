"""What is run: recipes, the networks and data they are made of, and how long they take."""
