"""Training: configuration, data, losses, optimiser, the loop, and recipes.

Reading order: `config` (everything a run is), `data` (documents to batches), `losses`, `optim`,
`step` (one update), `state` (checkpoints of a run), `loop` (the run).
"""
