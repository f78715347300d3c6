"""Steps of a program: where they end, and how long they take."""
