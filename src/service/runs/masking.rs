//! Masks the paths of this machine in texts for callers. Only the operator sees the paths, in the log.

use std::path::{Path, PathBuf};

use super::{RunService, RunServiceConfig, RunServiceInner};
use crate::base::path_mask::PathMask;
use crate::gateway::config::GatewayConfig;
use crate::relay::delivery::DeliveryStatus;
use crate::runner::RunResult;
use crate::runner::agents::AgentCatalog;
use crate::runner::branch_delivery::DeliveryReport;
use crate::sandbox::InitBinary;

/// Returns the mask of all paths of this machine that the service knows.
pub(super) fn build_path_mask(
    settings: &RunServiceConfig,
    config: &GatewayConfig,
    catalog: &AgentCatalog,
) -> PathMask {
    let host = &settings.host;
    let init = match &host.init {
        InitBinary::Configured(path) => Some(path.as_path()),
        InitBinary::BuiltIn { directory } => Some(directory.as_path()),
        InitBinary::None => None,
    };
    let own = [&*settings.state_dir, &*host.run_dir, &*host.docker_socket, Path::new(CGROUP_ROOT)];
    let roots = catalog.entries().filter_map(|entry| entry.rootfs.as_deref());
    let files = config.files.iter().map(PathBuf::as_path);
    PathMask::new(own.into_iter().chain(init).chain(files).chain(roots))
}

impl RunService {
    /// Returns a text with the paths of this machine masked, as a caller may read it.
    pub fn mask_text(&self, text: &str) -> String {
        self.0.path_mask.load().mask_paths(text).into_owned()
    }
}

impl RunServiceInner {
    /// Masks a text for a run's caller. The log has the original text.
    pub(super) fn mask_in_place(&self, run: &str, text: &mut String) {
        let masked = self.path_mask.load().mask_paths(text).into_owned();
        if masked != *text {
            tracing::warn!(run, text, "masked the paths of this machine in a text for the caller");
            *text = masked;
        }
    }

    pub(super) fn mask_result(&self, result: &mut RunResult) {
        if let Some(error) = &mut result.error {
            self.mask_in_place(&result.run_id, error);
        }
        match &mut result.relay {
            Some(DeliveryReport::Delivered(delivered)) => {
                self.mask_delivered(&result.run_id, delivered);
            }
            Some(DeliveryReport::NotDelivered { why, .. }) => {
                self.mask_in_place(&result.run_id, why);
            }
            Some(DeliveryReport::Skipped { .. }) | None => (),
        }
    }

    /// Removes the fields that are useful only on this machine: the commands and paths that the operator reads with
    /// `relay status`.
    pub(super) fn mask_delivered(&self, run: &str, delivered: &mut DeliveryStatus) {
        delivered.apply = None;
        delivered.workspace = None;
        delivered.audit = None;
        let texts = delivered.reasons.iter_mut();
        let texts = texts.chain(&mut delivered.why).chain(&mut delivered.statement);
        texts.for_each(|text| self.mask_in_place(run, text));
    }
}

/// The mount point of the kernel's cgroups, whose names are internal to this machine.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
