"""For authors of tensor subclasses: what the all-gather extension protocol promises, as one test.

.. code-block:: python

    from composable_shard.testing.extension_kit import check_extension

    def test_my_tensor():
        check_extension(lambda shape: MyTensor(torch.randn(shape)))
"""

from composable_shard.testing.extension_kit.kit import check_extension
from composable_shard.testing.extension_kit.report import Finding, Report

__all__ = ["Finding", "Report", "check_extension"]
