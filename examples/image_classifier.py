"""Classify handwritten digits with every pixel a token, with any mechanism inside.

    python examples/image_classifier.py
    python examples/image_classifier.py --method nystrom --patch 2 --steps 200

It trains on scikit-learn's 1,797 digits of 8 x 8 pixels, a fifth of which are held out. It prints the training loss and the
accuracy on the held-out digits.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from subquad.models import SubquadConfig, SubquadForImageClassification


def digits(seed: int) -> list[Tensor]:
    """Training images (B, 1, 8, 8), test images, training labels (B,), test labels."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        print("This example reads scikit-learn's digits. Install it with: pip install scikit-learn", file=sys.stderr)
        sys.exit(2)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return train_test_split(images, torch.tensor(data.target), test_size=0.2, random_state=seed, stratify=data.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="linear", help="the mechanism of self-attention (linear)")
    parser.add_argument("--patch", type=int, default=1, help="side of a patch in pixels: 1, 2, 4 or 8 (1)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (600)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, test_images, labels, test_labels = digits(args.seed)
    config = SubquadConfig(
        method=args.method,
        position="learned",
        max_position_embeddings=64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=8,
        patch_size=args.patch,
        num_channels=1,
        num_labels=10,
    )
    model = SubquadForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (64,))
        loss = model(images[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps:
            print(f"step {step:5}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)

    model.eval()
    with torch.no_grad():
        predicted = model(test_images).logits.argmax(1)
    print(f"test accuracy {(predicted == test_labels).float().mean().item():.3f} of {len(test_labels)} digits")


if __name__ == "__main__":
    main()
