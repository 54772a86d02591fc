import dataclasses


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple
