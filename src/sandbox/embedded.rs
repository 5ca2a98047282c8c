//! The driver that needs neither a daemon nor an image.

use tokio::io::AsyncWrite;

use super::output::Output;
use super::{Cause, Ended, Error, Order};

/// What a sandbox of our own may do without, where this machine has not got it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Without limits on memory, processes and processors, where this process may not set them.
    pub may_be_unlimited: bool,
}

/// Runs one sandbox to its end, or until `until` says why it must end before; then nothing is left of it.
///
/// # Errors
/// The sandbox could not be made, or was lost on the way.
#[expect(clippy::unused_async, reason = "it will wait")]
pub async fn run<W: AsyncWrite + Unpin>(
    _settings: &Settings,
    _order: &Order,
    _output: &mut Output<W>,
    _until: impl Future<Output = Cause>,
) -> Result<Ended, Error> {
    Err(Error::Embedded("not by this build".to_owned()))
}
