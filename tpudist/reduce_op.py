"""How values of several replicas become one value."""

import enum


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined.

    As `tf.distribute.ReduceOp`, which has `SUM` and `MEAN`; `MIN` and `MAX` are ours.

    Attributes:
        SUM: They add up.
        MEAN: Their sum, divided by the number of replicas.
        MIN: The least, elementwise.
        MAX: The greatest, elementwise.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def parse(cls, op: "ReduceOp | str") -> "ReduceOp":
        """The member that `op` is or names, in any case.

        Raises:
            ValueError: A string that names no member.
            TypeError: Neither a member nor a string.
        """
        if isinstance(op, cls):
            return op
        names = ", ".join(cls.__members__)
        if isinstance(op, str):
            if op.upper() in cls.__members__:
                return cls[op.upper()]
            raise ValueError(f"'{op}' is not a valid ReduceOp. Use one of {names}.")
        raise TypeError(
            f"A reduction received a value of type {type(op).__name__} as its op. It must be a "
            f"tpudist.ReduceOp or its name: {names}."
        )

    @staticmethod
    def from_variable_aggregation(aggregation: "VariableAggregation | ReduceOp") -> "ReduceOp":
        """The reduction that a variable's aggregation asks for: `SUM` or `MEAN`, or itself.

        Raises:
            ValueError: For `NONE` and `ONLY_FIRST_REPLICA`, which reduce nothing.
        """
        if isinstance(aggregation, ReduceOp):
            return aggregation
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(
            f"{aggregation} has no ReduceOp. Only VariableAggregation.SUM and MEAN reduce."
        )


class VariableSynchronization(enum.Enum):
    """When the replicas' copies of a variable are made one. As `tf.VariableSynchronization`.

    Attributes:
        AUTO: `ON_WRITE`.
        NONE: Refused, but by strategies of one device, whose variables are ordinary ones.
        ON_WRITE: When it is assigned: the variable is equal on every replica.
        ON_READ: When it is read: each replica has a component of its own.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How the replicas' writes to, or copies of, a variable combine.

    As `tf.VariableAggregation`.

    Attributes:
        NONE: Not at all: only what is equal on every replica may be assigned.
        SUM: They add up.
        MEAN: Their sum, divided by the number of replicas.
        ONLY_FIRST_REPLICA: The first replica's counts, and no other.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
