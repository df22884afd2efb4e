"""The former name of :mod:`everybit.barriers`."""

from everybit.barriers import sqrt as sqrt
