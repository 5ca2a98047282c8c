//! The container that serves a run's gateway beside the run's sandbox, as a request to Docker Engine.
//!
//! **Invariant:** the request holds no secret, because `docker inspect` shows every part of it. Secrets are files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, RestartPolicy, RestartPolicyNameEnum,
};

use super::{bind_body, body_digest, owner_labels};
use crate::sandbox::spec::{BindMount, MountAccess, OwnerLabels, SOCKET_DIR_TARGET};

/// The specification of a gateway's container. It has a network and the upstream's key; the sandbox has only the
/// socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayContainerSpec {
    pub run: String,
    /// The image, by name or id.
    pub image: String,
    /// The network: one of the engine's, `bridge` or `host`.
    pub network: String,
    /// The user of the container, who owns the mounted files.
    pub uid: u32,
    pub gid: u32,
    pub env: BTreeMap<String, String>,
    /// The directory of the run's socket on this machine. The container creates the socket, so the mount is writable.
    pub socket_dir: PathBuf,
    pub mounts: Vec<BindMount>,
}

/// Returns the request that creates the container, from an image that the engine has.
pub fn container_body(
    proxy: &GatewayContainerSpec,
    image: &str,
    stamp: &OwnerLabels,
) -> ContainerCreateBody {
    let mut body = ContainerCreateBody {
        image: Some(image.to_owned()),
        cmd: Some(vec!["proxy".to_owned()]),
        env: Some(proxy.env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
        user: Some(format!("{}:{}", proxy.uid, proxy.gid)),
        stop_signal: Some("SIGTERM".to_owned()),
        host_config: Some(host_config(proxy)),
        ..ContainerCreateBody::default()
    };
    let digest = body_digest(&body);
    body.labels = Some(owner_labels(&proxy.run, stamp, digest));
    body
}

fn host_config(proxy: &GatewayContainerSpec) -> HostConfig {
    let socket = BindMount {
        source: proxy.socket_dir.clone(),
        target: SOCKET_DIR_TARGET.into(),
        access: MountAccess::ReadWrite,
    };
    HostConfig {
        network_mode: Some(proxy.network.clone()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        mounts: Some(std::iter::once(&socket).chain(&proxy.mounts).map(bind_body).collect()),
        pids_limit: Some(MAX_PIDS),
        memory: Some(MAX_MEMORY_BYTES),
        memory_swap: Some(MAX_MEMORY_BYTES),
        // The log explains an early end of the gateway, and is removed with the container.
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".to_owned()),
            config: Some([("max-size".to_owned(), "1m".to_owned())].into()),
        }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        ..HostConfig::default()
    }
}

/// The maximum number of processes, as in `docker/compose.yaml`.
const MAX_PIDS: i64 = 64;
/// The maximum memory in bytes, as in `docker/compose.yaml`.
const MAX_MEMORY_BYTES: i64 = 128 << 20;
