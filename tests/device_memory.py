"""Where GPU tests put the destinations of transitions."""

import torch

from reshard.arena import Arena


class DeviceMemory:
    """Destination storages in one arena on the GPU."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.arena, self.count = Arena.cuda(0), 0

    def __call__(self, name: str, num_bytes: int) -> torch.Tensor:
        self.count += 1
        return self.arena.allocate(f"{self.count}.{name}", num_bytes).tensor(shape=(num_bytes,))
