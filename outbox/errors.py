"""Every error this package raises on purpose.

OutboxError
├── SettingsError         a setting is missing or wrong; raised while function_app is imported
├── EventRefused          an event that could never be stored or delivered; raised before anything is written
├── DatabaseUnavailable   the database cannot answer now; the same call may succeed later
└── DoorbellUnavailable   the queue cannot be reached now; nothing is lost, a later drain finds the row
"""


class OutboxError(Exception):
    """Base of all errors below."""


class SettingsError(OutboxError):
    """Names each setting that is missing or wrong and says what it should be, without its value."""


class EventRefused(OutboxError):
    """The event cannot become a row. Its text names the field and the remedy."""


class DatabaseUnavailable(OutboxError):
    """No connection, an exhausted pool or server, or a lock or statement that timed out."""


class DoorbellUnavailable(OutboxError):
    """The storage queue refused the message, or did not answer in time."""
