//! The checks of an engine, of its images and of its volumes before they become a part of a sandbox. Images and volumes
//! may have parts that no client requested, and an engine may leave out what was requested.

use std::path::Path;

use bollard::models::{self, SystemInfoCgroupVersionEnum};

use super::{DockerEngine, HTTP_NOT_FOUND, has_status};
use crate::sandbox::spec::{SandboxSpec, VolumeMount, WORKSPACE_TARGET, is_allowed_target};
use crate::sandbox::{SandboxError, docker};

impl DockerEngine {
    /// Checks that the engine gives each sandbox a cgroup namespace of its own, as it is requested. With cgroup v1 every
    /// version of Podman ignores the request: the sandbox would see the machine's names of cgroups.
    ///
    /// # Errors
    /// Returns [`SandboxError::SharedCgroupNamespace`] if the engine does not.
    pub async fn check_cgroup_namespaces(&self) -> Result<(), SandboxError> {
        if !self.is_podman() {
            return Ok(());
        }
        let info = self.client.info().await.map_err(self.failure("report its settings"))?;
        match info.cgroup_version {
            Some(SystemInfoCgroupVersionEnum::_2) => Ok(()),
            _ => Err(SandboxError::SharedCgroupNamespace { engine: self.name }),
        }
    }

    /// Returns the id of an image whose declared volumes are all covered by mounts of `spec`.
    ///
    /// # Errors
    /// Returns an error if the image does not exist, or if the engine would add a writable disk for one of its volumes.
    pub(super) async fn resolve_image(
        &self,
        name: &str,
        spec: &SandboxSpec,
    ) -> Result<String, SandboxError> {
        let image = self.inspect_image(name).await?;
        let declared = image.config.and_then(|config| config.volumes).unwrap_or_default();
        // The engine would make an anonymous volume for each declared volume: a writable disk without a limit.
        match declared.into_iter().find(|target| !has_mount_at(spec, Path::new(target))) {
            Some(target) => {
                let (image, instead) = (name.to_owned(), volume_remedy(Path::new(&target)));
                Err(SandboxError::ImageVolume { image, target, instead })
            }
            None => docker::require_id(image.id, name),
        }
    }

    /// Checks the volumes before a container is created with them: the engine would create a missing volume, which
    /// would remain.
    ///
    /// # Errors
    /// Returns an error if a volume does not exist, or is not a directory of the engine's own.
    pub(super) async fn check_volumes(&self, volumes: &[VolumeMount]) -> Result<(), SandboxError> {
        for VolumeMount { name, .. } in volumes {
            let found = self.client.inspect_volume(name).await.map_err(|source| {
                if has_status(&source, HTTP_NOT_FOUND) {
                    return SandboxError::NoVolume(name.to_owned());
                }
                self.failure("inspect the volume")(source)
            })?;
            if let Some(feature) = unsupported_volume(&found) {
                return Err(SandboxError::UnsupportedVolume { name: name.clone(), what: feature });
            }
        }
        Ok(())
    }
}

/// Returns true if a requested mount, a requested volume or the workspace covers this path.
fn has_mount_at(spec: &SandboxSpec, path: &Path) -> bool {
    let mounts = spec.mounts.iter().map(|mount| &mount.target);
    let mut targets = mounts.chain(spec.volumes.iter().map(|volume| &volume.target));
    let has_workspace = spec.workspace_path().is_some();
    targets.any(|target| target == path) || has_workspace && path == Path::new(WORKSPACE_TARGET)
}

/// Returns the part of an error that names the alternatives to a volume at this path.
fn volume_remedy(target: &Path) -> &'static str {
    if target == Path::new(WORKSPACE_TARGET) {
        "give the run a workspace, or "
    } else if is_allowed_target(target) {
        "give a mount or a volume there, or "
    } else {
        ""
    }
}

/// Returns the reason not to use a volume; `None` if the volume is a plain directory of the engine.
fn unsupported_volume(volume: &models::Volume) -> Option<String> {
    if volume.driver != "local" {
        return Some(format!("the driver `{}`", volume.driver));
    }
    // The local driver mounts any directory or disk of the machine through the option `device`.
    let is_device = |name: &&String| name.eq_ignore_ascii_case("device");
    let name = volume.options.keys().find(is_device)?;
    Some(format!("`{}`", volume.options[name]))
}
