"""The blocks of a model: found, their options priced, one option chosen for each."""
