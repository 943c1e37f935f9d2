"""The options of slime and vime as one dataclass, and the engines that these options describe."""
