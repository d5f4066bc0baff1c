"""Operations that combine the values of several replicas."""

import enum


class ReduceOp(enum.Enum):
    """Operation that combines the values of all replicas.

    Matches `tf.distribute.ReduceOp`, which has `SUM` and `MEAN`; tpudist adds `MIN` and `MAX`.

    Attributes:
        SUM: The sum of the values.
        MEAN: The sum of the values, divided by the number of replicas.
        MIN: The minimum, elementwise.
        MAX: The maximum, elementwise.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def parse(cls, op: "ReduceOp | str") -> "ReduceOp":
        """Returns the member for `op`, which may be its name in upper or lower case.

        Raises:
            ValueError: If a string is not the name of a member.
            TypeError: If `op` is neither a member nor a string.
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
        """Returns the reduction of a variable's aggregation: `SUM` or `MEAN`.

        Raises:
            ValueError: If `aggregation` is `NONE` or `ONLY_FIRST_REPLICA`, which reduce nothing.
        """
        if isinstance(aggregation, ReduceOp):
            return aggregation
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[aggregation.name]
        raise ValueError(
            f"{aggregation} has no ReduceOp. Only VariableAggregation.SUM and MEAN reduce."
        )


class VariableSynchronization(enum.Enum):
    """Time at which the copies of a variable are combined; matches `tf.VariableSynchronization`.

    Attributes:
        AUTO: `ON_WRITE`.
        NONE: No combination; only for strategies with one device.
        ON_WRITE: At each assignment: the variable is equal on every replica.
        ON_READ: At each read: each replica has its own component.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """Rule that combines the replicas' writes to, or copies of, a variable.

    Matches `tf.VariableAggregation`.

    Attributes:
        NONE: No combination: you may assign only values that are equal on every replica.
        SUM: The sum of the values.
        MEAN: The sum of the values, divided by the number of replicas.
        ONLY_FIRST_REPLICA: Only the value of the first replica.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
