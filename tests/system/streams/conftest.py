"""The processes of whole stacks are forked."""

from tests.helpers.zygote import session_zygote as session_zygote
