//! The models that an upstream says it has.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::headers::{self, InjectedHeaders, UpstreamRequestHead};
use super::{UpstreamCall, UpstreamClient, UpstreamConfig};
use crate::base::rope::SplicedBytes;
use crate::gateway::run::{RequestId, RunIdentity};
use crate::llm::protocol::GatewayRoute;

/// Why it is not known which models there are.
#[derive(Debug, thiserror::Error)]
pub enum ModelListError {
    #[error(transparent)]
    Headers(#[from] headers::IdentityHeaderError),
    #[error("the upstream's authorities cannot be loaded")]
    Authorities(#[from] io::Error),
    #[error(transparent)]
    Upstream(#[from] super::UpstreamError),
    #[error("the upstream has not told its models within {} s", MODEL_LIST_TIMEOUT.as_secs())]
    Late,
    #[error("the upstream's answer is {0}, and no list of models")]
    Refused(StatusCode),
    #[error("the upstream's answer is no list of models")]
    Unreadable,
}

#[derive(Deserialize)]
struct ModelListBody {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
}

/// Asks for the ids of all of them, in the upstream's order.
///
/// # Errors
/// It does not say.
pub async fn list_models(config: &UpstreamConfig) -> Result<Vec<String>, ModelListError> {
    let deadline = Instant::now() + MODEL_LIST_TIMEOUT;
    timeout_at(deadline, Box::pin(request_models(config)))
        .await
        .map_err(|_| ModelListError::Late)?
}

async fn request_models(config: &UpstreamConfig) -> Result<Vec<String>, ModelListError> {
    let (upstream, of_nobody) = (UpstreamClient::new(config)?, headers::HeaderConfig::default());
    let overwrites = Arc::new(InjectedHeaders::new(config, &RunIdentity::default(), &of_nobody)?);
    let request = Request::new(());
    let head = UpstreamRequestHead::new(
        GatewayRoute::Models,
        &request,
        &of_nobody,
        overwrites,
        &RequestId::new(),
    );
    let response = upstream
        .send_call(UpstreamCall { head, body: SplicedBytes::default(), deadline: None })
        .await?;
    if !response.status.is_success() {
        return Err(ModelListError::Refused(response.status));
    }
    let body = Limited::new(response.body, MAX_MODEL_LIST_BYTES).collect().await;
    let body = body.map_err(|_| ModelListError::Unreadable)?.to_bytes();
    let list: ModelListBody =
        serde_json::from_slice(&body).map_err(|_| ModelListError::Unreadable)?;
    Ok(list.data.into_iter().map(|model| model.id).collect())
}

/// For the list. Ours: whoever needs it can do without.
const MODEL_LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// Of the list. A thousand models are some hundred kilobytes.
const MAX_MODEL_LIST_BYTES: usize = 4 << 20;
