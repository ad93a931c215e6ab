"""The OpenAI-compatible door: names of adapters in `model`, tenants and their limits, headers that say what answered.

Pure: `fields`, `chat`, `completions` (a body -> a Job), `stops` and `choice` (tokens -> cut text), `wire` (text -> JSON
and SSE), `names` (who may ask for what), `limits` (rates; the library reads the clock), `tenants` (the file).
Shell: `door` (Triton), `generation` (one request's life), `routes`, `admin`, `server`.
"""
