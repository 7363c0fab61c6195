"""Small transitions with checksums, graphs and parts, for compute-sanitizer."""

import torch

import reshard


def main() -> None:
    """Two updates by launches, by graphs and by parts, each verified."""
    source = {f"layers.{i}.w": torch.randn(33 + i, 65, device="cuda") for i in range(3)}
    destination = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    for options in ({"graph": False}, {"graph": True}, {"graph": True, "parts": "layers"}):
        with reshard.Resharder(plan, source, destination, **options) as resharder:
            for _ in range(2):
                for tensor in source.values():
                    tensor.add_(1)
                resharder.run()
                resharder.verify()
                assert all(torch.equal(destination[name], t.bfloat16()) for name, t in source.items())
    print("transitions are as expected")


if __name__ == "__main__":
    main()
