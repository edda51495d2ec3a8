import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.List;

/** The JDK's client as Spring AI and LangChain4j use it: by default it offers h2c in the request that has the body. */
public final class JvmClient {
    private static final HttpClient CLIENT = HttpClient.newHttpClient();

    private static HttpRequest request(String prefix, String path, String body) {
        return HttpRequest.newBuilder(URI.create(System.getenv(prefix + "_URL") + path))
            .header("Content-Type", "application/json")
            .timeout(Duration.ofSeconds(60))
            .POST(HttpRequest.BodyPublishers.ofString(body.replace("MODEL", System.getenv(prefix + "_MODEL"))))
            .build();
    }

    private static HttpResponse<String> post(String prefix, String path, String body) throws Exception {
        return CLIENT.send(request(prefix, path, body), HttpResponse.BodyHandlers.ofString());
    }

    private static void check(HttpResponse<String> answer, int status, String words) {
        if (answer.statusCode() != status || !answer.body().contains(words)) {
            throw new AssertionError(answer.request().uri() + ": " + answer.statusCode() + " " + answer.body());
        }
    }

    private static String chat(String text) {
        return "{\"model\": \"MODEL\", \"max_tokens\": 8, \"messages\": [{\"role\": \"user\", \"content\": \"" + text + "\"}]}";
    }

    public static void main(String[] arguments) throws Exception {
        for (String path : List.of("/v1/chat/completions", "/v1/messages", "/api/chat")) {
            check(post("TOKENLOOM", path, chat("What is a KV block?").replace("}]}", "}], \"stream\": false}")), 200, "content");
        }
        String streamed = chat("What is a KV block?").replace("}]}", "}], \"stream\": true}");
        HttpRequest asking = request("TOKENLOOM", "/v1/chat/completions", streamed);
        List<String> lines = CLIENT.send(asking, HttpResponse.BodyHandlers.ofLines()).body().toList();
        if (!lines.contains("data: [DONE]")) {
            throw new AssertionError(lines);
        }
        String tool = "{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\"}}}";
        String tools = "}], \"tools\": [" + tool + "]}";
        check(post("SCRIPTED", "/v1/chat/completions", chat("What is the weather?").replace("}]}", tools)), 200, "get_weather");
        // Bodies of several packets, each on a connection that was used before.
        check(post("TOKENLOOM", "/v1/chat/completions", chat("word ".repeat(4000))), 400, "context_length_exceeded");
        check(post("TOKENLOOM", "/v1/messages", chat("word ".repeat(4000))), 400, "prompt is too long");
        check(post("TOKENLOOM", "/v1/chat/completions", chat("x").replace("MODEL", "none-such")), 404, "model_not_found");
        check(post("SCRIPTED", "/v1/chat/completions", chat("Answer that I ask too often.")), 429, "rate_limit");
        System.out.println("chats, messages, Ollama with Upgrade: h2c; a stream, a call, long bodies, errors");
    }
}
