"""Small programs that the README quotes."""
