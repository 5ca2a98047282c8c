//! The files of a gateway's container. The files that the container reads are copied into the run's directory. The
//! files that it writes are at the operator's paths.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::GatewayContainerConfig;
use crate::base::secret::SecretString;
use crate::gateway::config::GatewayConfig;
use crate::runner::directory::RunDirectory;
use crate::sandbox::spec::{BindMount, MountAccess};
use crate::telemetry::access_log::{AccessLogDestination, AccessLogFormat, FORMAT_VARIABLE};

/// The written files, as the container sees them: settings with their paths, and mounts.
pub(super) struct GatewayContainerFiles {
    pub(super) env: BTreeMap<String, String>,
    pub(super) mounts: Vec<BindMount>,
    /// The audit log on this machine.
    pub(super) audit: PathBuf,
}

/// A directory of files that only the container's user can read.
struct MountedDir {
    path: PathBuf,
    owner: (u32, u32),
    env: BTreeMap<String, String>,
}

pub(super) fn write_files(
    settings: &GatewayContainerConfig,
    config: &GatewayConfig,
    directory: &RunDirectory,
) -> anyhow::Result<GatewayContainerFiles> {
    let owner = directory.gateway_user();
    let path = directory.path().join("proxy");
    fs::create_dir(&path).with_context(|| creation_error(&path))?;
    change_owner(&path, owner, 0o700)?;
    // The gateway makes its socket in this directory, so the container's user has to own the directory.
    chown(directory.socket_dir(), Some(owner.0), Some(owner.1))?;
    let mut mounted_dir = MountedDir { path: path.clone(), owner, env: BTreeMap::new() };
    mounted_dir.write_secret("LITELLM_MASTER_KEY_FILE", &config.upstream.api_key)?;
    if let Some(key) = &config.audit.signing_key {
        mounted_dir.write_secret("AUDIT_SIGNING_KEY_FILE", key)?;
    }
    mounted_dir.copy_file("CONFIG", settings.config_file.as_deref())?;
    mounted_dir.copy_file("PRICES_FILE", config.prices.file.as_deref())?;
    mounted_dir.copy_file("UPSTREAM_CA_FILE", config.upstream.ca_file.as_deref())?;
    let mut mounts = vec![BindMount {
        source: path,
        target: FILES_TARGET.into(),
        access: MountAccess::ReadOnly,
    }];
    // The runner itself reads the audit log, so there is one even if the operator wants none.
    let audit = config.audit.path.clone().unwrap_or_else(|| directory.path().join("audit.jsonl"));
    let mut log = |name: &str, file: &str, source: &Path| {
        let source = create_writable(source, owner)?;
        let target = format!("{LOGS_TARGET}/{file}");
        mounted_dir.env.insert(name.to_owned(), target.clone());
        mounts.push(BindMount { source, target: target.into(), access: MountAccess::ReadWrite });
        anyhow::Ok(())
    };
    log("AUDIT_LOG_PATH", "audit.jsonl", &audit)?;
    match &config.access_log {
        AccessLogDestination::Off => {
            drop(mounted_dir.env.insert("ACCESS_LOG_PATH".to_owned(), "off".to_owned()));
        }
        AccessLogDestination::File(path) => log("ACCESS_LOG_PATH", "access.log", path)?,
        AccessLogDestination::Stdout | AccessLogDestination::Stderr => {
            bail!("`ACCESS_LOG_PATH` has to be a file where the gateway is a container")
        }
    }
    if config.access_log_format == AccessLogFormat::Json {
        mounted_dir.env.insert(FORMAT_VARIABLE.to_owned(), "json".to_owned());
    }
    Ok(GatewayContainerFiles { env: mounted_dir.env, mounts, audit })
}

impl MountedDir {
    fn write_secret(&mut self, name: &str, secret: &SecretString) -> anyhow::Result<()> {
        self.write_file(name, secret.expose_secret().as_bytes())
    }

    fn copy_file(&mut self, name: &str, file: Option<&Path>) -> anyhow::Result<()> {
        let Some(file) = file else { return Ok(()) };
        let text = fs::read(file)
            .with_context(|| format!("`{name}` is `{}`, which cannot be read", file.display()))?;
        self.write_file(name, &text)
    }

    fn write_file(&mut self, name: &str, text: &[u8]) -> anyhow::Result<()> {
        // The file is named after its setting, and the setting contains the file's path in the container.
        let file = name.to_ascii_lowercase();
        let path = self.path.join(&file);
        fs::write(&path, text).with_context(|| creation_error(&path))?;
        change_owner(&path, self.owner, 0o400)?;
        self.env.insert(name.to_owned(), format!("{FILES_TARGET}/{file}"));
        Ok(())
    }
}

/// Makes a file that the container may append to, and returns its path without symlinks. The file is mounted alone, so
/// that the container cannot see the files beside it.
fn create_writable(path: &Path, owner: (u32, u32)) -> anyhow::Result<PathBuf> {
    // The file must exist before the container mounts it.
    let open = || {
        File::options().append(true).create(true).mode(0o600).open(path)?;
        chown(path, Some(owner.0), Some(owner.1))?;
        fs::canonicalize(path)
    };
    open().with_context(|| creation_error(path))
}

fn change_owner(path: &Path, (uid, gid): (u32, u32), mode: u32) -> anyhow::Result<()> {
    let own = || {
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        chown(path, Some(uid), Some(gid))
    };
    own().with_context(|| creation_error(path))
}

fn creation_error(path: &Path) -> String {
    format!("`{}` cannot be made for the gateway's container", path.display())
}

/// The container's directory of the files that it reads.
const FILES_TARGET: &str = "/cogni";

/// The container's directory of the files that it writes. The image contains this directory.
const LOGS_TARGET: &str = "/var/log/cogni";
