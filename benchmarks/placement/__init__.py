"""Compares rules of placement in a simulation of engines with continuous batching and prefix caches.

    python -m tokenloom.bench.placement [--seeds 1 2 3] [--seconds 60]

Tokenloom's rules run as the coordinator runs them: the real registry under a virtual clock, which sees picks at once
and reports 30 ms apart, with the rates that the engines' own code measures and the blocks that their caches evicted.
The others see the engines exactly.

- llm-d: the sum of three parts of the prompt that is cached there and two of the rank between the longest and the
  shortest queue (weights of the default profile, per Red Hat OpenShift AI 3.4, "Configuring scheduler settings for LLM
  inference services"), with queues scraped every 50 ms.
- Dynamo: blocks to prefill, waiting ones and own, plus active blocks ("Router Design", docs.nvidia.com/dynamo).

The engine is that of an 8B model on an H100: a step takes 6 ms, 0.05 ms for each running request and 0.03 ms for each
prompt token, of at most 2,048 tokens. Blocks have 256 tokens here, so that the lists of hashes stay short; "4 k" shows
a rule that sees only the first 4,096 tokens of a prompt, as the coordinator did before.
"""
