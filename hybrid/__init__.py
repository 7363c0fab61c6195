"""One controller, many workers: train engines, rollout engines and the calls between them."""
