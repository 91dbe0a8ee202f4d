"""The page of `tightfit explore`: a question about a step, asked and answered in a browser."""
