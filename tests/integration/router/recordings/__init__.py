"""What a router said to a server: reading it, writing it, and what is always true of it."""
