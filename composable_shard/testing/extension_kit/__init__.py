"""For authors of tensor subclasses: what the all-gather extension protocol promises, as one test.

.. code-block:: python

    from composable_shard.testing.extension_kit import check_extension

    def test_my_tensor():
        check_extension(lambda shape: MyTensor(torch.randn(shape)))
"""

from composable_shard.testing.extension_kit.hooks import Finding, Report
from composable_shard.testing.extension_kit.kit import check_extension

__all__ = ["Finding", "Report", "check_extension"]
