"""Plans inside other libraries' training loops (guests). Each guest is imported only by its own module."""
