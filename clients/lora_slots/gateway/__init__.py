"""The OpenAI-compatible door: names of adapters in `model`, tenants and their limits, headers that say what answered.

Pure: `bodies` with `body_size` and `body_errors`, `jobs` (a body -> a Job), `stops` and `choice` (tokens -> cut text),
`wire` (text -> JSON and SSE), `names` (who may ask for what), `limits` (rates; given a clock), `tenants` (the file);
of gRPC `http2` with `http2_frames` and `http2_events`, `grpc_wire`, `responses`.
Shell: `protocol` (connections), `edge` (around every request), `door` (Triton) with `channel` and `connection` (gRPC),
`generation` (one request's life), `routes`, `admin`, `server`.
"""
