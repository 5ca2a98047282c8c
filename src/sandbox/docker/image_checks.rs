//! What an engine has of its own that a sandbox is made of: an image, and volumes. Both may bring along what nobody has asked for.

use std::path::Path;

use bollard::models;

use super::{DockerEngine, HTTP_NOT_FOUND, has_status};
use crate::sandbox::spec::{SandboxSpec, VolumeMount, WORKSPACE_TARGET, is_allowed_target};
use crate::sandbox::{SandboxError, docker};

impl DockerEngine {
    /// The id of an image of which nothing can be written.
    ///
    /// # Errors
    /// There is no such image, or the engine would give it a disk of its own.
    pub(super) async fn resolve_image(
        &self,
        name: &str,
        spec: &SandboxSpec,
    ) -> Result<String, SandboxError> {
        let image = self.inspect_image(name).await?;
        let places = image.config.and_then(|config| config.volumes).unwrap_or_default();
        match places.into_iter().find(|place| !has_mount_at(spec, Path::new(place))) {
            Some(place) => {
                let (image, instead) = (name.to_owned(), volume_remedy(Path::new(&place)));
                Err(SandboxError::ImageVolume { image, place, instead })
            }
            None => docker::require_id(image.id, name),
        }
    }

    /// Looks at volumes before a container is made of them: one that is not there would be made with it, and stay.
    ///
    /// # Errors
    /// One is not there, or is not the engine's own directory.
    pub(super) async fn check_volumes(&self, volumes: &[VolumeMount]) -> Result<(), SandboxError> {
        for VolumeMount { name, .. } in volumes {
            let found = self.client.inspect_volume(name).await.map_err(|source| {
                if has_status(&source, HTTP_NOT_FOUND) {
                    return SandboxError::NoVolume(name.to_owned());
                }
                SandboxError::Engine { doing: "look at the volume", source }
            })?;
            if let Some(what) = unsupported_volume(&found) {
                return Err(SandboxError::Volume { name: name.clone(), what });
            }
        }
        Ok(())
    }
}

/// Whether something that was asked for stands there in its place.
fn has_mount_at(spec: &SandboxSpec, place: &Path) -> bool {
    let mounts = spec.mounts.iter().map(|mount| &mount.target);
    let mut targets = mounts.chain(spec.volumes.iter().map(|volume| &volume.target));
    let has_workspace = spec.workspace_path().is_some();
    targets.any(|target| target == place) || has_workspace && place == Path::new(WORKSPACE_TARGET)
}

/// What can be asked for there.
fn volume_remedy(place: &Path) -> &'static str {
    if place == Path::new(WORKSPACE_TARGET) {
        "give the run a workspace, or "
    } else if is_allowed_target(place) {
        "give a mount or a volume there, or "
    } else {
        ""
    }
}

/// What a volume is, if not a directory that the engine has made for it.
fn unsupported_volume(volume: &models::Volume) -> Option<String> {
    if volume.driver != "local" {
        return Some(format!("the driver `{}`", volume.driver));
    }
    let is_device = |name: &&String| name.eq_ignore_ascii_case("device");
    let name = volume.options.keys().find(is_device)?;
    Some(format!("`{}`", volume.options[name]))
}
