"""Where the figures of a training go beside metrics.jsonl: TensorBoard, Trackio, Weights & Biases."""
