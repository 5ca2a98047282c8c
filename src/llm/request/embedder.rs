//! Recognizes models that embed only text, by their names.
//!
//! LiteLLM passes a text that begins like a web address on as text. A provider whose model embeds
//! images too may fetch the address ([the reasons](crate::manual::decisions::d0032)).

/// Returns true if the model embeds only text. `asked` is the name in the client's request,
/// `upstream` is the upstream's own name. The operator defines both names.
pub(super) fn embeds_text_only(asked: &str, upstream: &str) -> bool {
    let (asked, upstream) = (asked.to_ascii_lowercase(), upstream.to_ascii_lowercase());
    // A medium's name part outweighs a text part: `nv-embed-vl` matches both and embeds images.
    let has = |part: &&str| asked.contains(part) || upstream.contains(part);
    TEXT_EMBEDDER_NAME_PARTS.iter().any(has) && !MEDIA_EMBEDDER_NAME_PARTS.iter().any(has)
}

/// Name parts of models that embed text.
const TEXT_EMBEDDER_NAME_PARTS: [&str; 37] = [
    "ada-002",
    "arctic-embed",
    "bge-",
    "codestral-embed",
    "doubao-embedding-text",
    "e5-",
    "embed-code",
    "embed-english",
    "embed-multilingual",
    "embed-qa",
    "embed-text",
    "embedding-gecko",
    "embedding-text",
    "embeddinggemma",
    "embedqa",
    "gemini-embedding",
    "granite-embedding",
    "gte-",
    "jina-embeddings-v2",
    "jina-embeddings-v3",
    "minilm",
    "mistral-embed",
    "mpnet",
    "mxbai-embed",
    "nomic-embed-code",
    "nv-embed",
    "qwen3-embedding",
    "sfr-embedding",
    "solar-embedding",
    "stella",
    "text-embedding",
    "text-multilingual-embedding",
    "textembedding",
    "titan-embed-g1",
    "voyage-3",
    "voyage-4",
    "voyage-code",
];

/// Name parts of models that embed images as well. One of these parts outweighs every part that
/// names text.
const MEDIA_EMBEDDER_NAME_PARTS: [&str; 9] =
    ["clip", "colpali", "image", "multimodal", "omni", "vision", "visual", "-vl", "video"];

#[cfg(test)]
mod tests {
    use super::embeds_text_only;

    #[test]
    fn a_model_is_for_text_if_its_name_says_so() {
        for text in [
            "text-embedding-3-small",
            "openai/text-embedding-ada-002",
            "azure/Text-Embedding-3-Large",
            "amazon.titan-embed-text-v2:0",
            "cohere.embed-english-v3",
            "BAAI/bge-m3",
            "nomic-embed-text",
            "gemini/gemini-embedding-001",
            "voyage/voyage-3-large",
            "jina_ai/jina-embeddings-v3",
        ] {
            assert!(embeds_text_only(text, text), "{text}");
        }
        for other in [
            "m",
            "",
            "embedder",
            "multimodalembedding@001",
            "voyage-multimodal-3",
            "jina-embeddings-v4",
            "jina-clip-v2",
            "amazon.titan-embed-image-v1",
            "nvidia/nvclip",
            "nomic-embed-vision-v1.5",
            "gme-qwen2-vl",
            "nv-embed-vl",
        ] {
            assert!(!embeds_text_only(other, other), "{other}");
        }
        assert!(embeds_text_only("text-embedding-ours", "ours"), "the operator has named it");
        assert!(!embeds_text_only("text-embedding-ours", "clip-ours"));
    }
}
