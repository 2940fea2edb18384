from squared_relu import SquaredReLU

from subquad.testing import MechanismContract


class TestSquaredReLU(MechanismContract):
    mechanisms = (SquaredReLU(), SquaredReLU(floor=0.5))
