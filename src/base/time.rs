//! Time that can be counted to.

use std::time::Duration;

/// A hundred years. A configured time is cut to it before it is added to a clock, which cannot count to any sum.
pub const MAX_TIME: Duration = Duration::from_hours(36_500 * 24);
