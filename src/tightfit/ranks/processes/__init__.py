"""Several processes that train together: how they were started, how they wait for each other, how they end."""
