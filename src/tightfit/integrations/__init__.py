"""Plans inside other libraries' training loops. Each library is imported only by its own module."""
