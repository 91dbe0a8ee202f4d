"""The files of a run by name, for those who write them and for those who only list runs."""

CONFIG, PLAN, METRICS, RESULT = "config.yaml", "plan.json", "metrics.jsonl", "result.json"
PICTURE, PAGE = "memory.png", "report.html"
REFERENCE = "reference.safetensors"  # log-probabilities of preference pairs before the first step
CHECKPOINTS = "checkpoints"  # the folder of the checkpoints
LOCK = ".tightfit.lock"
MODEL = "model"  # before the names of a model's tensors in a checkpoint
MASKS = "masks.safetensors"  # of weights that stay zero
