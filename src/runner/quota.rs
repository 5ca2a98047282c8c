//! How much a run's workspace may hold, where it is a directory that is made for it.
//!
//! Not every file system has quotas, and a directory has none of its own. So it is measured: before a run, and from time
//! to time while it runs. What is written between two looks is not prevented, and what was deleted while it is open is not
//! seen, until the run ends.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::base::tree;

/// A workspace, and its bound.
#[derive(Clone, Debug)]
pub(super) struct Quota {
    path: PathBuf,
    most: u64,
}

/// It holds more than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the workspace holds more than {}, which is as much as it may (`max_workspace` of the limits)", Bytes(*most))]
pub struct Exceeded {
    pub(super) most: u64,
}

impl Quota {
    pub(super) fn new(path: PathBuf, most: u64) -> Self {
        Self { path, most }
    }

    /// # Errors
    /// It holds more than it may. What cannot be measured is told, and let be.
    pub(super) async fn check(&self) -> Result<(), Exceeded> {
        let Self { path, most } = self.clone();
        let measured = spawn_blocking(move || tree::measure(&path, most)).await;
        match measured.map_err(std::io::Error::from).flatten() {
            Ok(bytes) if bytes > most => Err(Exceeded { most }),
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::warn!(%error, path = %self.path.display(), "a workspace cannot be measured");
                Ok(())
            }
        }
    }

    /// Returns when it holds more than it may.
    pub(super) async fn exceeded(&self) -> Exceeded {
        loop {
            let begun = Instant::now();
            if let Err(exceeded) = self.check().await {
                return exceeded;
            }
            sleep(LOOK.max(begun.elapsed() * SHARE)).await;
        }
    }
}

/// For people: `4 GiB`, `1.5 MiB`.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    #[expect(clippy::cast_precision_loss, reason = "one digit after the point is shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0 as f64, "bytes");
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if number < 1024.0 {
                break;
            }
            (number, unit) = (number / 1024.0, larger);
        }
        let shown = format!("{number:.1}");
        write!(f, "{} {unit}", shown.strip_suffix(".0").unwrap_or(&shown))
    }
}

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// A look at a million files takes its time; the pause after it is so many times that.
const SHARE: u32 = 20;
