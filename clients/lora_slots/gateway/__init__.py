"""The OpenAI-compatible door: names of adapters in `model`, tenants and their limits, headers that say what answered.

Pure: `bodies` with `body_size` and `body_errors`, `jobs` (a body -> a Job), `stops` and `choice` (tokens -> cut text),
`wire` (text -> JSON and SSE), `names` (who may ask for what), `limits` (rates; given a clock), `tenants` (the file).
Shell: `protocol` (connections), `edge` (around every request), `door` (Triton), `generation` (one request's life),
`routes`, `admin`, `server`.
"""
