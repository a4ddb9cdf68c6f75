"""The mechanism that simulator and engine share: requests, queues, KV blocks, batches, decisions."""
